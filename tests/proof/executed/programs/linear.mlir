#map = affine_map<()[s0, s1] -> (s1, s0)>
#map1 = affine_map<()[s0, s1] -> (s1 + 16, s0)>
#map2 = affine_map<()[s0, s1] -> (s0 - s1)>
#map3 = affine_map<()[s0] -> ((s0 floordiv 512) mod 2)>
#map4 = affine_map<()[s0] -> (s0 floordiv 512)>
#map5 = affine_map<()[s0, s1, s2] -> (s0 + s1 * s2)>
#map6 = affine_map<()[s0, s1] -> ((s0 - s1 + 15) floordiv 16)>
#map7 = affine_map<()[s0] -> (s0 * 4096)>
#map8 = affine_map<()[s0] -> (s0 * 8)>
#map9 = affine_map<()[s0, s1, s2] -> (s1 - s2, s0 * 8)>
#map10 = affine_map<()[s0, s1, s2] -> (-s0 + s1 - s2, 8)>
module attributes {dlti.target_system_spec = #dlti.target_system_spec<"NPU" : #hacc.target_device_spec<#dlti.dl_entry<"AI_CORE_COUNT", 24 : i32>, #dlti.dl_entry<"CUBE_CORE_COUNT", 24 : i32>, #dlti.dl_entry<"VECTOR_CORE_COUNT", 48 : i32>, #dlti.dl_entry<"UB_SIZE", 1572864 : i32>, #dlti.dl_entry<"L1_SIZE", 4194304 : i32>, #dlti.dl_entry<"L0A_SIZE", 524288 : i32>, #dlti.dl_entry<"L0B_SIZE", 524288 : i32>, #dlti.dl_entry<"L0C_SIZE", 1048576 : i32>, #dlti.dl_entry<"UB_ALIGN_SIZE", 256 : i32>, #dlti.dl_entry<"L1_ALIGN_SIZE", 256 : i32>, #dlti.dl_entry<"L0C_ALIGN_SIZE", 4096 : i32>>>,   hivm.module_core_type = #hivm.module_core_type<MIX>} {
  func.func @linear_infer_workspace_shape_function() -> index attributes {hacc.function_kind = #hacc.function_kind<HOST>, hacc.host_func_type = #hacc.host_func_type<infer_workspace_shape_function>} {
    %c4096 = arith.constant 4096 : index
    return %c4096 : index
  }
  func.func @linear_infer_task_type_function() -> i8 attributes {hacc.function_kind = #hacc.function_kind<HOST>, hacc.host_func_type = #hacc.host_func_type<infer_task_type_function>} {
    %c32_i8 = arith.constant 32 : i8
    return %c32_i8 : i8
  }
  func.func @linear_mix_aic(%arg0: i64 {hacc.arg_type = #hacc.arg_type<ffts_base_address>}, %arg1: memref<?xi8, #hivm.address_space<gm>> {hacc.arg_type = #hacc.arg_type<sync_block_lock>}, %arg2: memref<?xi8, #hivm.address_space<gm>> {hacc.arg_type = #hacc.arg_type<workspace>}, %arg3: memref<?xi8, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg4: memref<?xi8, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg5: memref<?xf32, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg6: memref<?xf32, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg7: memref<?xbf16, #hivm.address_space<gm>>, %arg8: memref<?xbf16, #hivm.address_space<gm>> {tt.tensor_kind = 1 : i32}, %arg9: i32, %arg10: i32, %arg11: i32, %arg12: i32, %arg13: i32, %arg14: i32, %arg15: i32, %arg16: i32) attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, func_dyn_memref_args = dense<[false, true, true, true, true, true, true, true, true, false, false, false, false, false, false, false, false]> : vector<17xi1>, hacc.entry, hacc.function_kind = #hacc.function_kind<DEVICE>, hivm.func_core_type = #hivm.func_core_type<AIC>, hivm.part_of_mix, hivm.storage_aligned, parallel_mode = "simd"} {
    %false = arith.constant false
    %c0_i8 = arith.constant 0 : i8
    %c16 = arith.constant 16 : index
    %c16_i32 = arith.constant 16 : i32
    %c64_i32 = arith.constant 64 : i32
    %c512_i32 = arith.constant 512 : i32
    %c0_i32 = arith.constant 0 : i32
    %c512 = arith.constant 512 : index
    %c64 = arith.constant 64 : index
    %c1_i64 = arith.constant 1 : i64
    %c3_i64 = arith.constant 3 : i64
    %c4_i64 = arith.constant 4 : i64
    %c2_i64 = arith.constant 2 : i64
    %c-1_i64 = arith.constant -1 : i64
    %c40960_i64 = arith.constant 40960 : i64
    %c0_i64 = arith.constant 0 : i64
    %c8192_i64 = arith.constant 8192 : i64
    %c49152_i64 = arith.constant 49152 : i64
    %0 = hivm.hir.pointer_cast(%c8192_i64) : memref<16x4x16x32xi8, #hivm.address_space<cbuf>>
    %1 = hivm.hir.pointer_cast(%c49152_i64) : memref<16x4x16x32xi8, #hivm.address_space<cbuf>>
    %2 = hivm.hir.pointer_cast(%c0_i64) : memref<16x1x16x32xi8, #hivm.address_space<cbuf>>
    %3 = hivm.hir.pointer_cast(%c40960_i64) : memref<16x1x16x32xi8, #hivm.address_space<cbuf>>
    hivm.hir.set_ffts_base_addr %arg0
    hivm.hir.set_mask_norm
    %4 = hivm.hir.get_block_idx -> i64
    %5 = arith.trunci %4 : i64 to i32
    %6 = arith.divsi %5, %arg16 : i32
    %7 = arith.remsi %6, %arg15 : i32
    %8 = arith.muli %arg16, %arg15 : i32
    %9 = arith.divsi %5, %8 : i32
    %10 = arith.remsi %9, %arg14 : i32
    %11 = arith.muli %10, %c16_i32 : i32
    %12 = arith.muli %7, %c64_i32 : i32
    %13 = arith.index_cast %11 : i32 to index
    %14 = arith.index_cast %arg12 : i32 to index
    %15 = arith.index_cast %12 : i32 to index
    %16 = arith.index_cast %arg11 : i32 to index
    %17 = arith.index_cast %arg9 : i32 to index
    %18 = affine.max #map()[%13, %17]
    %19 = affine.min #map1()[%18, %13]
    %20 = affine.apply #map2()[%19, %13]
    %21 = arith.cmpi slt, %20, %c16 : index
    %22 = hivm.hir.pointer_cast(%c0_i64) : memref<4x1x16x16xi32, #hivm.address_space<cc>>
    hivm.hir.set_flag[<PIPE_MTE1>, <PIPE_MTE2>, <EVENT_ID1>]
    hivm.hir.set_flag[<PIPE_MTE1>, <PIPE_MTE2>, <EVENT_ID2>]
    hivm.hir.set_flag[<PIPE_MTE1>, <PIPE_MTE2>, <EVENT_ID3>]
    hivm.hir.set_flag[<PIPE_MTE1>, <PIPE_MTE2>, <EVENT_ID4>]
    scf.for %arg17 = %c0_i32 to %arg11 step %c512_i32  : i32 {
      %26 = arith.index_cast %arg17 : i32 to index
      %27 = affine.apply #map3()[%26]
      %28 = arith.index_cast %27 : index to i64
      %29 = arith.cmpi eq, %28, %c1_i64 : i64
      %30 = arith.select %29, %1, %0 : memref<16x4x16x32xi8, #hivm.address_space<cbuf>>
      %31 = arith.index_cast %arg17 : i32 to index
      %32 = affine.apply #map3()[%31]
      %33 = arith.index_cast %32 : index to i64
      %34 = arith.cmpi eq, %33, %c1_i64 : i64
      %35 = arith.select %34, %3, %2 : memref<16x1x16x32xi8, #hivm.address_space<cbuf>>
      %36 = arith.index_cast %arg17 : i32 to index
      %37 = affine.apply #map4()[%36]
      %38 = arith.index_cast %37 : index to i64
      %39 = arith.index_cast %arg17 : i32 to index
      %40 = affine.apply #map3()[%39]
      %41 = arith.index_cast %40 : index to i1
      %42 = arith.select %41, %c3_i64, %c4_i64 : i64
      %43 = arith.index_cast %40 : index to i1
      %44 = arith.select %43, %c1_i64, %c2_i64 : i64
      %45 = arith.index_cast %arg17 : i32 to index
      %46 = affine.apply #map5()[%45, %13, %14]
      %reinterpret_cast = memref.reinterpret_cast %arg3 to offset: [%46], sizes: [16, 512], strides: [%14, 1] : memref<?xi8, #hivm.address_space<gm>> to memref<16x512xi8, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>
      %subview = memref.subview %reinterpret_cast[0, 0] [%20, 512] [1, 1] : memref<16x512xi8, strided<[?, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x512xi8, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>
      %47 = affine.apply #map6()[%19, %13]
      %subview_1 = memref.subview %35[0, 0, 0, 0] [16, %47, 16, 32] [1, 1, 1, 1] : memref<16x1x16x32xi8, #hivm.address_space<cbuf>> to memref<16x?x16x32xi8, strided<[512, 512, 32, 1]>, #hivm.address_space<cbuf>>
      scf.if %21 {
        hivm.hir.set_flag[<PIPE_MTE1>, <PIPE_MTE2>, <EVENT_ID0>]
        %collapse_shape = memref.collapse_shape %35 [[0, 1, 2, 3]] : memref<16x1x16x32xi8, #hivm.address_space<cbuf>> into memref<8192xi8, #hivm.address_space<cbuf>>
        hivm.hir.wait_flag[<PIPE_MTE1>, <PIPE_MTE2>, <EVENT_ID0>]
        %cast_10 = memref.cast %collapse_shape : memref<8192xi8, #hivm.address_space<cbuf>> to memref<?xi8, strided<[?], offset: ?>, #hivm.address_space<cbuf>>
        func.call @set_l1_2d_int8_t(%c0_i8, %cast_10) : (i8, memref<?xi8, strided<[?], offset: ?>, #hivm.address_space<cbuf>>) -> ()
        hivm.hir.pipe_barrier[<PIPE_MTE2>]
      } {hivm.unlikely_condition}
      hivm.hir.wait_flag[<PIPE_MTE1>, <PIPE_MTE2>, %44]
      %cast_2 = memref.cast %subview : memref<?x512xi8, strided<[?, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x?xi8, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>
      %cast_3 = memref.cast %subview_1 : memref<16x?x16x32xi8, strided<[512, 512, 32, 1]>, #hivm.address_space<cbuf>> to memref<?x?x?x?xi8, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>
      func.call @nd2nz_int8_t(%cast_2, %cast_3) : (memref<?x?xi8, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>, memref<?x?x?x?xi8, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>) -> ()
      hivm.hir.set_flag[<PIPE_MTE2>, <PIPE_MTE1>, <EVENT_ID0>]
      %48 = affine.apply #map5()[%45, %15, %16]
      %reinterpret_cast_4 = memref.reinterpret_cast %arg4 to offset: [%48], sizes: [64, 512], strides: [%16, 1] : memref<?xi8, #hivm.address_space<gm>> to memref<64x512xi8, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>
      hivm.hir.wait_flag[<PIPE_MTE1>, <PIPE_MTE2>, %42]
      %cast_5 = memref.cast %reinterpret_cast_4 : memref<64x512xi8, strided<[?, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x?xi8, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>
      %cast_6 = memref.cast %30 : memref<16x4x16x32xi8, #hivm.address_space<cbuf>> to memref<?x?x?x?xi8, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>
      func.call @nd2nz_int8_t(%cast_5, %cast_6) : (memref<?x?xi8, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>, memref<?x?x?x?xi8, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>) -> ()
      hivm.hir.set_flag[<PIPE_MTE2>, <PIPE_MTE1>, <EVENT_ID1>]
      %49 = arith.cmpi eq, %arg17, %c0_i32 : i32
      %cast_7 = memref.cast %35 : memref<16x1x16x32xi8, #hivm.address_space<cbuf>> to memref<?x?x?x?xi8, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>
      %cast_8 = memref.cast %30 : memref<16x4x16x32xi8, #hivm.address_space<cbuf>> to memref<?x?x?x?xi8, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>
      %cast_9 = memref.cast %22 : memref<4x1x16x16xi32, #hivm.address_space<cc>> to memref<?x?x?x?xi32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>
      func.call @mma_tile_int8_t_to_int32_t_tb(%cast_7, %cast_8, %49, %20, %c512, %c64, %cast_9, %c0_i64, %c1_i64, %44, %42, %38, %c-1_i64, %c-1_i64, %c0_i8) : (memref<?x?x?x?xi8, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>, memref<?x?x?x?xi8, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>, i1, index, index, index, memref<?x?x?x?xi32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>, i64, i64, i64, i64, i64, i64, i64, i8) -> ()
    } {fixpipe_for_mmad_result_already_inserted = true}
    hivm.hir.wait_flag[<PIPE_MTE1>, <PIPE_MTE2>, <EVENT_ID1>]
    hivm.hir.wait_flag[<PIPE_MTE1>, <PIPE_MTE2>, <EVENT_ID2>]
    hivm.hir.wait_flag[<PIPE_MTE1>, <PIPE_MTE2>, <EVENT_ID3>]
    hivm.hir.wait_flag[<PIPE_MTE1>, <PIPE_MTE2>, <EVENT_ID4>]
    hivm.hir.set_flag[<PIPE_M>, <PIPE_FIX>, <EVENT_ID0>]
    %23 = hivm.hir.get_block_idx -> i64
    %24 = arith.index_cast %23 : i64 to index
    %25 = affine.apply #map7()[%24]
    %view = memref.view %arg2[%25][] : memref<?xi8, #hivm.address_space<gm>> to memref<16x64xi32, #hivm.address_space<gm>>
    hivm.hir.wait_flag[<PIPE_M>, <PIPE_FIX>, <EVENT_ID0>]
    %cast = memref.cast %22 : memref<4x1x16x16xi32, #hivm.address_space<cc>> to memref<?x?x?x?xi32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>
    %cast_0 = memref.cast %view : memref<16x64xi32, #hivm.address_space<gm>> to memref<?x?xi32, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>
    call @fixpipe_nz2nd_int32_t_to_int32_t_4d_to_2d(%cast, %cast_0, %c0_i64, %c0_i64, %false, %c0_i8) : (memref<?x?x?x?xi32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>, memref<?x?xi32, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>, i64, i64, i1, i8) -> ()
    hivm.hir.sync_block_set[<CUBE>, <PIPE_FIX>, <PIPE_S>] flag = 0 ffts_base_addr = %arg0
    hivm.hir.pipe_barrier[<PIPE_ALL>]
    return
  }
  func.func @linear_mix_aiv(%arg0: i64 {hacc.arg_type = #hacc.arg_type<ffts_base_address>}, %arg1: memref<?xi8, #hivm.address_space<gm>> {hacc.arg_type = #hacc.arg_type<sync_block_lock>}, %arg2: memref<?xi8, #hivm.address_space<gm>> {hacc.arg_type = #hacc.arg_type<workspace>}, %arg3: memref<?xi8, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg4: memref<?xi8, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg5: memref<?xf32, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg6: memref<?xf32, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg7: memref<?xbf16, #hivm.address_space<gm>>, %arg8: memref<?xbf16, #hivm.address_space<gm>> {tt.tensor_kind = 1 : i32}, %arg9: i32, %arg10: i32, %arg11: i32, %arg12: i32, %arg13: i32, %arg14: i32, %arg15: i32, %arg16: i32) attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, func_dyn_memref_args = dense<[false, true, true, true, true, true, true, true, true, false, false, false, false, false, false, false, false]> : vector<17xi1>, hacc.entry, hacc.function_kind = #hacc.function_kind<DEVICE>, hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.part_of_mix, hivm.storage_aligned, parallel_mode = "simd"} {
    %c2_i32 = arith.constant 2 : i32
    %c0_i32 = arith.constant 0 : i32
    %c2336_i64 = arith.constant 2336 : i64
    %c2080_i64 = arith.constant 2080 : i64
    %c2048_i64 = arith.constant 2048 : i64
    %c0_i64 = arith.constant 0 : i64
    %cst = arith.constant 0.000000e+00 : f32
    %c16 = arith.constant 16 : index
    %c16_i32 = arith.constant 16 : i32
    %c64_i32 = arith.constant 64 : i32
    %c0 = arith.constant 0 : index
    %0 = hivm.hir.get_block_idx -> i64
    %1 = arith.trunci %0 : i64 to i32
    %2 = arith.muli %arg16, %arg15 : i32
    %3 = arith.index_cast %arg9 : i32 to index
    %4 = arith.index_cast %arg13 : i32 to index
    %5 = hivm.hir.get_sub_block_idx -> i64
    %6 = arith.index_cast %5 : i64 to index
    %7 = affine.apply #map8()[%6]
    hivm.hir.set_ffts_base_addr %arg0
    hivm.hir.set_mask_norm
    %8 = arith.divsi %1, %arg16 : i32
    %9 = arith.remsi %8, %arg15 : i32
    %10 = arith.divsi %1, %2 : i32
    %11 = arith.remsi %10, %arg14 : i32
    %12 = arith.muli %11, %c16_i32 : i32
    %13 = arith.muli %9, %c64_i32 : i32
    %14 = arith.index_cast %12 : i32 to index
    %15 = arith.index_cast %13 : i32 to index
    %16 = hivm.hir.get_block_idx -> i64
    %17 = arith.index_cast %16 : i64 to index
    %18 = affine.apply #map7()[%17]
    %view = memref.view %arg2[%18][] : memref<?xi8, #hivm.address_space<gm>> to memref<16x64xi32, #hivm.address_space<gm>>
    hivm.hir.sync_block_wait[<VECTOR>, <PIPE_FIX>, <PIPE_S>] flag = 0
    %subview = memref.subview %view[%7, 0] [8, 64] [1, 1] {to_be_bubbled_slice} : memref<16x64xi32, #hivm.address_space<gm>> to memref<8x64xi32, strided<[64, 1], offset: ?>, #hivm.address_space<gm>>
    %19 = hivm.hir.pointer_cast(%c0_i64) : memref<8x64xi32, #hivm.address_space<ub>>
    %collapse_shape = memref.collapse_shape %subview [[0, 1]] : memref<8x64xi32, strided<[64, 1], offset: ?>, #hivm.address_space<gm>> into memref<512xi32, strided<[1], offset: ?>, #hivm.address_space<gm>>
    %collapse_shape_0 = memref.collapse_shape %19 [[0, 1]] : memref<8x64xi32, #hivm.address_space<ub>> into memref<512xi32, #hivm.address_space<ub>>
    %cast = memref.cast %collapse_shape : memref<512xi32, strided<[1], offset: ?>, #hivm.address_space<gm>> to memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<gm>>
    %cast_1 = memref.cast %collapse_shape_0 : memref<512xi32, #hivm.address_space<ub>> to memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    call @load_gm_to_ubuf_1d_int32_t(%cast, %cast_1, %c0_i32, %c0_i32, %c0) : (memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<gm>>, memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>, i32, i32, index) -> ()
    hivm.hir.set_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]
    %20 = hivm.hir.pointer_cast(%c0_i64) : memref<8x64xf32, #hivm.address_space<ub>>
    %collapse_shape_2 = memref.collapse_shape %20 [[0, 1]] : memref<8x64xf32, #hivm.address_space<ub>> into memref<512xf32, #hivm.address_space<ub>>
    hivm.hir.wait_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]
    %cast_3 = memref.cast %collapse_shape_0 : memref<512xi32, #hivm.address_space<ub>> to memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    %cast_4 = memref.cast %collapse_shape_2 : memref<512xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    call @vcast_int32_t_to_float_1d_with_mode(%cast_3, %cast_4, %c0_i32) : (memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, i32) -> ()
    %reinterpret_cast = memref.reinterpret_cast %arg5 to offset: [%14], sizes: [16, 1], strides: [1, 1] : memref<?xf32, #hivm.address_space<gm>> to memref<16x1xf32, strided<[1, 1], offset: ?>, #hivm.address_space<gm>>
    %21 = hivm.hir.pointer_cast(%c2048_i64) : memref<8x1xf32, #hivm.address_space<ub>>
    %22 = affine.max #map()[%14, %3]
    %23 = affine.min #map1()[%22, %14]
    %24 = affine.apply #map2()[%23, %14]
    %25 = arith.cmpi slt, %24, %c16 : index
    %26 = affine.min #map9()[%6, %23, %14]
    %27 = affine.min #map10()[%26, %23, %14]
    %subview_5 = memref.subview %reinterpret_cast[%7, 0] [8, 1] [1, 1] : memref<16x1xf32, strided<[1, 1], offset: ?>, #hivm.address_space<gm>> to memref<8x1xf32, strided<[1, 1], offset: ?>, #hivm.address_space<gm>>
    %subview_6 = memref.subview %subview_5[0, 0] [%27, 1] [1, 1] : memref<8x1xf32, strided<[1, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x1xf32, strided<[1, 1], offset: ?>, #hivm.address_space<gm>>
    %subview_7 = memref.subview %21[0, 0] [%27, 1] [1, 1] : memref<8x1xf32, #hivm.address_space<ub>> to memref<?x1xf32, strided<[1, 1]>, #hivm.address_space<ub>>
    scf.if %25 {
      %collapse_shape_35 = memref.collapse_shape %21 [[0, 1]] : memref<8x1xf32, #hivm.address_space<ub>> into memref<8xf32, #hivm.address_space<ub>>
      %cast_36 = memref.cast %collapse_shape_35 : memref<8xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @broadcast_scalar_float_to_1d(%cst, %cast_36) : (f32, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
      hivm.hir.set_flag[<PIPE_V>, <PIPE_MTE2>, <EVENT_ID0>]
      hivm.hir.wait_flag[<PIPE_V>, <PIPE_MTE2>, <EVENT_ID0>]
    } {hivm.unlikely_condition}
    %collapse_shape_8 = memref.collapse_shape %subview_6 [[0, 1]] : memref<?x1xf32, strided<[1, 1], offset: ?>, #hivm.address_space<gm>> into memref<?xf32, strided<[1], offset: ?>, #hivm.address_space<gm>>
    %collapse_shape_9 = memref.collapse_shape %subview_7 [[0, 1]] : memref<?x1xf32, strided<[1, 1]>, #hivm.address_space<ub>> into memref<?xf32, strided<[1]>, #hivm.address_space<ub>>
    %cast_10 = memref.cast %collapse_shape_8 : memref<?xf32, strided<[1], offset: ?>, #hivm.address_space<gm>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<gm>>
    %cast_11 = memref.cast %collapse_shape_9 : memref<?xf32, strided<[1]>, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    call @load_gm_to_ubuf_1d_float(%cast_10, %cast_11, %c2_i32, %cst, %c0) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<gm>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, i32, f32, index) -> ()
    hivm.hir.set_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]
    %28 = hivm.hir.pointer_cast(%c0_i64) : memref<8x64xf32, #hivm.address_space<ub>>
    %29 = hivm.hir.pointer_cast(%c2080_i64) : memref<64xf32, #hivm.address_space<ub>>
    hivm.hir.wait_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]
    hivm.hir.pipe_barrier[<PIPE_V>]
    %cast_12 = memref.cast %20 : memref<8x64xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
    %cast_13 = memref.cast %21 : memref<8x1xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
    %cast_14 = memref.cast %28 : memref<8x64xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
    %cast_15 = memref.cast %29 : memref<64xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    call @vmul_2d_float(%cast_12, %cast_13, %cast_14, %cast_15) : (memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
    %reinterpret_cast_16 = memref.reinterpret_cast %arg6 to offset: [%15], sizes: [1, 64], strides: [64, 1] : memref<?xf32, #hivm.address_space<gm>> to memref<1x64xf32, strided<[64, 1], offset: ?>, #hivm.address_space<gm>>
    %30 = hivm.hir.pointer_cast(%c2336_i64) : memref<1x64xf32, #hivm.address_space<ub>>
    %collapse_shape_17 = memref.collapse_shape %reinterpret_cast_16 [[0, 1]] : memref<1x64xf32, strided<[64, 1], offset: ?>, #hivm.address_space<gm>> into memref<64xf32, strided<[1], offset: ?>, #hivm.address_space<gm>>
    %collapse_shape_18 = memref.collapse_shape %30 [[0, 1]] : memref<1x64xf32, #hivm.address_space<ub>> into memref<64xf32, #hivm.address_space<ub>>
    %cast_19 = memref.cast %collapse_shape_17 : memref<64xf32, strided<[1], offset: ?>, #hivm.address_space<gm>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<gm>>
    %cast_20 = memref.cast %collapse_shape_18 : memref<64xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    call @load_gm_to_ubuf_1d_float(%cast_19, %cast_20, %c0_i32, %cst, %c0) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<gm>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, i32, f32, index) -> ()
    hivm.hir.set_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]
    %31 = hivm.hir.pointer_cast(%c0_i64) : memref<8x64xf32, #hivm.address_space<ub>>
    hivm.hir.wait_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]
    hivm.hir.pipe_barrier[<PIPE_V>]
    %32 = hivm.hir.pointer_cast(%c0_i64) : memref<0xf32, #hivm.address_space<ub>>
    %cast_21 = memref.cast %28 : memref<8x64xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
    %cast_22 = memref.cast %30 : memref<1x64xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
    %cast_23 = memref.cast %31 : memref<8x64xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
    %cast_24 = memref.cast %32 : memref<0xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    call @vmul_2d_float(%cast_21, %cast_22, %cast_23, %cast_24) : (memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
    %33 = affine.apply #map5()[%15, %14, %4]
    %reinterpret_cast_25 = memref.reinterpret_cast %arg8 to offset: [%33], sizes: [16, 64], strides: [%4, 1] : memref<?xbf16, #hivm.address_space<gm>> to memref<16x64xbf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>
    %subview_26 = memref.subview %reinterpret_cast_25[%7, 0] [8, 64] [1, 1] {to_be_bubbled_slice} : memref<16x64xbf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>> to memref<8x64xbf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>
    %34 = hivm.hir.pointer_cast(%c0_i64) : memref<8x64xbf16, #hivm.address_space<ub>>
    %collapse_shape_27 = memref.collapse_shape %31 [[0, 1]] : memref<8x64xf32, #hivm.address_space<ub>> into memref<512xf32, #hivm.address_space<ub>>
    %collapse_shape_28 = memref.collapse_shape %34 [[0, 1]] : memref<8x64xbf16, #hivm.address_space<ub>> into memref<512xbf16, #hivm.address_space<ub>>
    hivm.hir.pipe_barrier[<PIPE_V>]
    %cast_29 = memref.cast %collapse_shape_27 : memref<512xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    %cast_30 = memref.cast %collapse_shape_28 : memref<512xbf16, #hivm.address_space<ub>> to memref<?xbf16, strided<[?], offset: ?>, #hivm.address_space<ub>>
    call @vcast_float_to_bfloat16_t_1d_with_mode(%cast_29, %cast_30, %c0_i32) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xbf16, strided<[?], offset: ?>, #hivm.address_space<ub>>, i32) -> ()
    hivm.hir.set_flag[<PIPE_V>, <PIPE_MTE3>, <EVENT_ID0>]
    %subview_31 = memref.subview %34[0, 0] [%27, 64] [1, 1] : memref<8x64xbf16, #hivm.address_space<ub>> to memref<?x64xbf16, strided<[64, 1]>, #hivm.address_space<ub>>
    %subview_32 = memref.subview %subview_26[0, 0] [%27, 64] [1, 1] : memref<8x64xbf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x64xbf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>
    hivm.hir.wait_flag[<PIPE_V>, <PIPE_MTE3>, <EVENT_ID0>]
    %cast_33 = memref.cast %subview_31 : memref<?x64xbf16, strided<[64, 1]>, #hivm.address_space<ub>> to memref<?x?xbf16, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
    %cast_34 = memref.cast %subview_32 : memref<?x64xbf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x?xbf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>
    call @store_ubuf_to_gm_2d_bfloat16_t(%cast_33, %cast_34, %c0_i32) : (memref<?x?xbf16, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?x?xbf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>, i32) -> ()
    hivm.hir.pipe_barrier[<PIPE_ALL>]
    return
  }
}
